"""Engines: they run tasks, group rows and sort them. The functions are in ``pipeline`` and ``steps``.

======================  ============================================================================
``stages``              stages as data: a map over tasks, and a shuffle
``work_folder``         the results of tasks as files: the journal of a preparation
``engine``              the interface
``embedded``            processes and DuckDB on this machine, the default
``spark``               a Spark session
``ray``                 a Ray cluster
``flink``               a Flink cluster
``choose``              an engine by its name
======================  ============================================================================
"""
