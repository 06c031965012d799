"""Projects on a board: fetched, verified and installed for the trainer alone, where the operator lists them."""
