"""What ops cost on this machine, and what an optimizer keeps."""
