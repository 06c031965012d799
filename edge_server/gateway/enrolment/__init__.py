"""Enrolment of boards: one-time tokens, the HTTPS service, certificate renewal."""
