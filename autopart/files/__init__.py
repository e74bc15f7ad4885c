"""What is read and written: plans, clusters, presets, and plans kept on disk."""
