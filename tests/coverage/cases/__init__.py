"""The table of served models. A new overlay adds its row to the file of its kind."""

from tests.coverage.cases.composites import COMPOSITES
from tests.coverage.cases.decoders import DECODERS
from tests.coverage.cases.encoders import ENCODERS
from tests.coverage.cases.experts import EXPERTS
from tests.coverage.cases.shapes import SHAPES
from tests.coverage.cases.windows import WINDOWS

CASES = [*DECODERS, *WINDOWS, *SHAPES, *ENCODERS, *COMPOSITES, *EXPERTS]
