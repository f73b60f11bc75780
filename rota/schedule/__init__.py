"""Which task runs how, where and when: pure functions of a problem; only child.py knows of processes and clocks."""
