"""What is asked of a process: probes that run in a process of their own, and readers of processes that live."""
