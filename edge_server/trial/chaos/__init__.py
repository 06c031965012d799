"""A live site on this machine whose processes are killed at random moments, to show that nothing is lost."""
