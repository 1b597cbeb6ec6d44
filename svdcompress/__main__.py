"""`python -m svdcompress`, which is what `accelerate launch -m svdcompress` runs."""

from svdcompress.cli import main

if __name__ == "__main__":
    main()
