"""The server: a model behind OpenAI's HTTP interface."""
