"""The portable trace of a run: a folder of one header and a few CSV tables, made of a journal and made into one."""
