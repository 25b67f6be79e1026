"""The demo: the whole ROSE loop, small and with real parts, and the report on it."""
