"""The linter: mixed-precision mistakes that are visible in source code, and their fixes. It reads code, runs none, and loads no torch."""
