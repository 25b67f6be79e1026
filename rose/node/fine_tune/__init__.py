"""`rose serve --fine-tune`: what the operator chooses, and the processes beside the engine."""
