"""What is known of a board before it is asked, and how it is brought to other clocks and power modes."""
