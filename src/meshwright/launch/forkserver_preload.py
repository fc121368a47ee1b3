"""The first preload module of the fork server: disables garbage collection during imports.

The imported objects live as long as the process, and collecting them repeatedly takes a tenth of the time of
torch's import. A forked rank freezes these objects and enables collection again (``launch.local``), so that
they are neither traversed nor copied.
"""

import gc

gc.disable()
