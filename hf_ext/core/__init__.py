"""What every surface builds on: errors, model structure, artefacts and the list of upstream symbols."""
