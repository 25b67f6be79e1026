"""ROSE's processes on a Ray cluster. Ray places, starts and stops them; no turn and no weight passes it."""
