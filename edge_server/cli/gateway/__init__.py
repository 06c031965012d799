"""Commands for the gateway of a site."""
