"""One file per operation: its reference in torch, its faster paths, and the choice between them."""
