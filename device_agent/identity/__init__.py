"""Identity of a board: key, certificate, enrolment, renewal, trust in its clock."""
