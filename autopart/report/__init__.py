"""What a person looks at: a plan as a table, a timeline as a trace or a picture.  Reads the IR, changes nothing."""
