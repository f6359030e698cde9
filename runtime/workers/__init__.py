"""One process per device of an artifact for several: they run its modules together, with MPI between them."""
