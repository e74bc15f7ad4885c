"""What no plan can be faster than: bounds, and what CP-SAT proves."""
