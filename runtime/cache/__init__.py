"""The KV cache: who holds which page."""
