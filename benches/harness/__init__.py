"""What all benchmarks share: pairs, processes, page cache, memory, data, report."""
