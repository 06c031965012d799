"""Identity of a board: key, certificate, enrolment, renewal, and trust in its clock."""
