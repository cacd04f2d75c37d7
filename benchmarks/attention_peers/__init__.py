"""The parts of benchmarks/attention.py: its cases, its peers, the processes they run in, and the table."""
