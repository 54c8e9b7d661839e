"""`import hf_ext` registers with Transformers and PEFT in any order; each case runs in a process of its own."""

import pytest

from hf_ext._public import QUANTIZERS
from tests.fresh_process import FreshProcesses


IS_REGISTERED = """
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from hf_ext._public import QUANTIZERS
def path(cls):
    return f"{cls.__module__}:{cls.__qualname__}"
def held():
    return {
        name: (path(AUTO_QUANTIZATION_CONFIG_MAPPING[name]), path(AUTO_QUANTIZER_MAPPING[name])) for name in QUANTIZERS
    }
assert held() == QUANTIZERS, held()
"""
TAKEN = """
import warnings
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin
class OtherConfig(QuantizationConfigMixin): pass
class OtherQuantizer(HfQuantizer): pass
OtherConfig.__module__ = OtherQuantizer.__module__ = "otherlib.quant"
"""


@pytest.fixture(scope="module")
def run_python():
    with FreshProcesses("torch._dynamo") as processes:
        yield processes.run


ORDERS = {
    "hf_ext before transformers": "import hf_ext, transformers",
    "transformers before hf_ext": "import transformers, hf_ext",
    "an auto class before": "from transformers import AutoModelForCausalLM; import hf_ext",
    "an auto class after": "import hf_ext; from transformers import AutoModelForCausalLM",
    "a public name alone": "from hf_ext import OSAQConfig",
    "an own config alone": "import hf_ext.quantizers.osaq.config",
    "an own quantizer alone": "import hf_ext.quantizers.osaq.quantizer",
    "an own layer alone": "import hf_ext.quantizers.low_bit_linear",
}


@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS.keys())
def test_quantizers_are_registered(run_python, imports):
    run_python(imports + IS_REGISTERED)


@pytest.mark.parametrize("target", [path for paths in QUANTIZERS.values() for path in paths])
def test_registered_modules_do_not_pull_modeling_utils(run_python, target):
    """They are imported while `transformers.modeling_utils` is half imported, where that would be a cycle."""
    module = target.partition(":")[0]
    run_python(f"import {module}, sys; assert 'transformers.modeling_utils' not in sys.modules")


@pytest.mark.parametrize("imports", ["import hf_ext, peft.tuners.lora.model", "import peft.tuners.lora.model, hf_ext"])
def test_lora_dispatch_is_registered_once(run_python, imports):
    code = """
import importlib, sys
lora = sys.modules["peft.tuners.lora.model"]
registered = lora.dispatch_default
assert registered.__module__.startswith("hf_ext."), registered
importlib.reload(hf_ext._register)
importlib.reload(hf_ext._register)
assert lora.dispatch_default is registered
"""
    run_python(f"{imports}\n{code}")


def test_reloading_changes_nothing(run_python):
    code = "import importlib, hf_ext, transformers.quantizers.auto\n"
    code += "importlib.reload(hf_ext._register); importlib.reload(hf_ext); importlib.reload(hf_ext._register)\n"
    assert "already registered" not in run_python(code + IS_REGISTERED)


def test_reloading_before_transformers_changes_nothing(run_python):
    code = "import importlib, hf_ext\nimportlib.reload(hf_ext._register); importlib.reload(hf_ext._register)\n"
    assert "already registered" not in run_python(code + IS_REGISTERED)


def test_a_reloaded_config_module_is_still_ours(run_python):
    code = """
import importlib, transformers.quantizers.auto, hf_ext
config = importlib.reload(importlib.import_module("hf_ext.quantizers.osaq.config"))
config.OSAQConfig()
"""
    assert "already registered" not in run_python(code + IS_REGISTERED)


@pytest.mark.parametrize(
    "taken",
    [
        "auto.AUTO_QUANTIZATION_CONFIG_MAPPING['osaq'] = OtherConfig",
        "auto.AUTO_QUANTIZER_MAPPING['osaq'] = OtherQuantizer",
    ],
)
def test_a_taken_name_warns_once_at_import_and_raises_at_use(run_python, taken):
    code = f"""{TAKEN}
{taken}
tables = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
before = [table.get("osaq") for table in tables]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import hf_ext
(warning,) = [str(w.message) for w in caught if "already registered" in str(w.message)]
assert "'osaq'" in warning and "otherlib.quant" in warning and "Other" in warning, warning
try:
    hf_ext.OSAQConfig()
except RuntimeError as error:
    assert "'osaq'" in str(error) and "otherlib.quant" in str(error), error
else:
    raise AssertionError("a config was built under a name that another package would load")
assert [table.get("osaq") for table in tables] == before
"""
    run_python(code)


def test_a_name_taken_later_raises_at_use(run_python):
    code = f"""{TAKEN}
import hf_ext
hf_ext.OSAQConfig()
auto.AUTO_QUANTIZER_MAPPING["osaq"] = OtherQuantizer
try:
    hf_ext.OSAQConfig()
except RuntimeError as error:
    assert "OtherQuantizer" in str(error), error
else:
    raise AssertionError("a config was built under a name that another package would load")
"""
    run_python(code)


def test_a_lost_registration_is_made_good_at_use(run_python):
    code = """
import hf_ext
from transformers.quantizers import auto
del auto.AUTO_QUANTIZER_MAPPING["osaq"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["osaq"]
hf_ext.OSAQConfig()
"""
    run_python(code + IS_REGISTERED)


def test_an_unlisted_method_is_refused(run_python):
    code = """
from hf_ext._register import ensure_registered
try:
    ensure_registered("osak")
except ValueError as error:
    assert "quant_method='osak' has no line in" in str(error), error
    assert "Available: catq, littlebit2, osaq." in str(error), error
else:
    raise AssertionError("a method outside the table was accepted")
"""
    run_python(code)
