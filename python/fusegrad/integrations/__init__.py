"""fusegrad in other compilers and frameworks, each in a module of its own that imports what it integrates with."""
