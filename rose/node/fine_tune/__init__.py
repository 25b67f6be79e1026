"""`rose serve --fine-tune`: its options, and the processes beside the engine."""
