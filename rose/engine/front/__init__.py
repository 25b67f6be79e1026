"""vLLM's own API server in front of the router: chats become token-level turns."""
