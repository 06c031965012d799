"""Models at work on the board: releases, their trial and swap, and the process that serves them."""
