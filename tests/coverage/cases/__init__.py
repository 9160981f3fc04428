"""The table of served models. A new overlay needs a row in the file of its kind."""

from tests.coverage.cases.bart_relatives import BART_RELATIVES
from tests.coverage.cases.bert_relatives import BERT_RELATIVES
from tests.coverage.cases.composites import COMPOSITES
from tests.coverage.cases.decoders import DECODERS
from tests.coverage.cases.encoders import ENCODERS
from tests.coverage.cases.experts import EXPERTS
from tests.coverage.cases.first_decoders import FIRST_DECODERS
from tests.coverage.cases.hybrids import HYBRIDS
from tests.coverage.cases.multimodal import MULTIMODAL
from tests.coverage.cases.shapes import SHAPES
from tests.coverage.cases.windows import WINDOWS

CASES = [
    *DECODERS,
    *WINDOWS,
    *SHAPES,
    *FIRST_DECODERS,
    *ENCODERS,
    *BERT_RELATIVES,
    *BART_RELATIVES,
    *COMPOSITES,
    *EXPERTS,
    *MULTIMODAL,
    *HYBRIDS,
]
