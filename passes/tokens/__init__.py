"""The token axis: where a model may be cut along its sequences, and how."""
