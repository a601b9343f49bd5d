"""The paper's tables and figures on any target: cells, the jobs that measure them, and the report."""
