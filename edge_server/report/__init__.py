"""What a run came to, as a page to read and as tables for other tools; made of its journal alone."""
