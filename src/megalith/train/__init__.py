"""The driver that trains: the loop, what it measures, and what it leaves behind."""
