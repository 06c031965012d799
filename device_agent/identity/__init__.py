"""Who this board is: its key and certificate, how it gets them and keeps them, and what it may believe of its clock."""
