"""The per-host agent: starts, watches and stops the pool daemon, the engines and their sidecars."""
