"""``python -m meshwright``, which is also what ``torchrun -m meshwright train JOB`` runs."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
