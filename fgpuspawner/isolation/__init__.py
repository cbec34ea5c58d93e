"""What holds a session to its slice: backends behind one protocol, the check after each start, and the watchdog."""
