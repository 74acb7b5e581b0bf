"""Models of any mixer: language, images, recommendation, and sequence to sequence."""

from linattn.models.config import LMConfig as LMConfig
from linattn.models.language import Backbone as Backbone
from linattn.models.language import LanguageModel as LanguageModel
from linattn.models.recommend import RecommendConfig as RecommendConfig
from linattn.models.recommend import RecommendModel as RecommendModel
from linattn.models.seq2seq import Seq2SeqConfig as Seq2SeqConfig
from linattn.models.seq2seq import Seq2SeqModel as Seq2SeqModel
from linattn.models.stack import StackConfig as StackConfig
from linattn.models.vision import ImageConfig as ImageConfig
from linattn.models.vision import ImageModel as ImageModel
