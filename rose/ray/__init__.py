"""ROSE's processes on a Ray cluster. Ray places, starts and stops them; turns and weights don't pass it."""
