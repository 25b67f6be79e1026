"""Two RL pipelines on the same GPUs: what runs beside what, with which shares. Pure policies."""
