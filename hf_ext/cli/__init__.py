"""The command `hf-ext`. Nothing here imports torch before a command runs, so that `--help` is instant."""
