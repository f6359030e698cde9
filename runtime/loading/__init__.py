"""From a folder on disk to checked facts, mapped weights and a loaded library."""
