"""What trainers hang in to use ROSE; each module needs its trainer installed, and none is needed by ROSE."""
