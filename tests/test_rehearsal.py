"""An unchanged training on the stand-in for a GPU: its memory, whether it fits, and where that can't be told."""

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from answers import drawn
from factories import make_config, make_facts, make_measurement, make_plan, make_workload
from own_trainings import LLAMA_SCRIPT
from running import printed, process, python, until, wait_for

from autotune import rehearsal, rehearse
from autotune.cost.kernels import KEEPS_WORKSPACES
from autotune.errors import InputError, MachineError
from autotune.estimates.report import Lever, Rehearsal
from autotune.output.estimate_table import cards_table, rehearsal_table
from autotune.rehearsal import chance_to_fit, rehearse_on_all
from autotune.space.knobs import changes
from autotune.stand_in import device
from autotune.values.catalogue import gpu_named, gpus
from autotune.values.trial import Alive, Memory, PeakParts

GIB = 1 << 30
IS_FOR_CUDA = torch.version.cuda is not None

# A module of the user's own, in which the sign of a feature chooses the expert: of the data, of the model's output, or
# of that in evaluation alone.
SCRIPT = """
import sys
import tempfile
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

width, batch, routing = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tempfile.TemporaryFile().close()  # there is a folder for it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in "ab")
        self.last = nn.Linear(width, 2)

    def forward(self, features, labels=None):
        hidden = self.first(features).relu()
        known = routing == "data" or (routing == "evaluated" and self.training)
        chosen = (features if known else hidden)[:, 0] > 0
        for expert, rows in zip(self.experts, (chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0])):
            hidden = hidden.index_add(0, rows, expert(hidden[rows]))
        return {"loss": nn.functional.cross_entropy(self.last(hidden), labels)}


rows = [{"features": torch.full((8,), 1.0 if i % 4 else -1.0), "labels": i % 2} for i in range(batch)]
arguments = TrainingArguments("out", per_device_train_batch_size=batch, max_steps=3, report_to="none")
Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
"""


def made(**fields):
    """Return a rehearsal as it could be."""
    peak = Memory(allocated_bytes=20 * GIB, reserved_bytes=21 * GIB, device_bytes=22 * GIB)
    plain = {"operator": "", "knob": None}
    mlp = Alive(kind="activations", module="model.layers.*.mlp", tensors=24, allocated_bytes=12 * GIB, **plain)
    weights = Alive(kind="weights", module="", tensors=10, allocated_bytes=8 * GIB, **plain)
    given = {
        "gpu": "rtx-4090", "memory_bytes": 24 * GIB, "workload": make_workload(), "peak": peak,
        "parts": PeakParts(phases={"first step": peak}, alive=(mlp, weights)), "chance_to_fit": 1.0, "versions": {},
    }  # fmt: skip
    return Rehearsal(**{**given, **fields})


def test_chances_follow_how_far_the_stand_in_is_off():
    def chance(device_gib):
        memory = Memory(reserved_bytes=int((device_gib - 1) * GIB), device_bytes=int(device_gib * GIB))
        return chance_to_fit(memory, 24 * GIB, 0.2 * GIB)

    assert chance(24) == pytest.approx(0.5)
    assert chance(23) > 0.95
    assert chance(20) > 0.999
    assert chance(25.5) < 0.01


def test_the_table_says_what_the_peak_is_made_of_and_whether_it_fits(command, monkeypatch):
    text = drawn(rehearsal_table(made()))
    assert "fits rtx-4090 of 24.00 GiB (chance over 99 %)" in text
    assert "model.layers.*.mlp" in text
    short = made(chance_to_fit=0.002, short="1.43 GiB were asked for with 23.1 GiB in use")
    assert "does not fit rtx-4090 of 24.00 GiB (chance under 1 %)" in drawn(rehearsal_table(short))
    assert "with that much memory: 1.43 GiB were asked for" in drawn(rehearsal_table(short))
    none = "no other configuration of the same training is expected to fit"
    of_loop = short.model_copy(update={"levers": None})
    assert [none in drawn(rehearsal_table(found)) for found in (short, of_loop)] == [True, False]
    monkeypatch.setattr(rehearsal, "rehearse", lambda **_: short)
    done = command("script", "--gpu", "rtx-4090", "--dry-run", "--", "python", "train.py")
    assert (done.exit_code, "takes 22.00 GiB where memory is ample, what torch" in done.stderr) == (5, True)


def test_several_devices_are_named_and_so_is_what_a_lever_changes():
    facts, bf16 = make_facts(), {"precision": "bf16"}
    plan = make_plan(facts=facts, baseline=make_config(8, parallelism={"world_size": 4}, **bf16))
    assert make_plan().baseline not in rehearsal._lighter(make_plan(), None, make_measurement())
    sharded = make_config(8, parallelism={"world_size": 4, "sharding": "fsdp_full"}, **bf16)
    lever = Lever(changes=changes(sharded, plan), memory=Memory(device_bytes=9 * GIB), chance_to_fit=1.0)
    text = drawn(rehearsal_table(made(devices=4, chance_to_fit=0.0, short="too much", levers=(lever,))))
    assert "does not fit 4 x rtx-4090 of 24.00 GiB" in text
    said = "the same training, rounded in other places, with sharding fsdp_full: takes 9.00 GiB, fits"
    assert said in " ".join(text.split())
    assert "on 4 devices" in drawn(cards_table([made(devices=4)]))


def test_a_table_of_gpus_leaves_out_where_it_cannot_be_told():
    text = drawn(cards_table([made(), made(gpu="t4", refused="no kernel"), made(gpu="l4", chance_to_fit=0.1)]))
    assert "not told: t4: no kernel" in text
    assert "it ran once for a compute capability, on the largest" in text
    assert re.search(r"rtx-4090 .* 24.0 .* 22.00 .* yes .* over 99 %", text)
    assert re.search(r"l4 .* 24.0 .* 22.00 .* no .* 10%", text)
    assert "no: near capacity unused blocks can be given back" in text
    assert "near capacity" not in drawn(cards_table([made()]))


def test_a_capability_that_the_script_cannot_train_on_costs_the_others_nothing(monkeypatch):
    def rehearse_here(*, gpu):
        if gpu in refusing:
            raise InputError("--tf32 requires Ampere")
        return made(gpu=gpu, memory_bytes=gpu_named(gpu).memory_bytes, short="asked for more")

    monkeypatch.setattr(rehearsal, "rehearse", rehearse_here)
    refusing = {gpu.name for gpu in gpus() if gpu.capability == (7, 5)}
    found = {each.gpu: each for each in rehearse_on_all()}
    assert found["t4"].refused == "--tf32 requires Ampere"
    assert found["t4"].chance_to_fit == 0
    assert found["h100-80gb"].refused is None
    assert found["h100-80gb"].chance_to_fit > 0.99 > 0.01 > found["rtx-3070"].chance_to_fit
    known = [gpu for gpu in gpus() if gpu.name in found and found[gpu.name].refused is None]
    largest = {(gpu.capability, max(g.memory_bytes for g in known if g.capability == gpu.capability)) for gpu in known}
    ran = [(gpu.capability, gpu.memory_bytes) in largest for gpu in known]
    assert [found[gpu.name].short is not None for gpu in known] == ran
    refusing = {gpu.name for gpu in gpus()}
    with pytest.raises(InputError, match="Ampere"):
        rehearse_on_all()


@pytest.mark.parametrize("gpu", ["v100-32gb", "mi300x"])
def test_a_gpu_that_the_stand_in_does_not_have(gpu, tmp_path):
    with pytest.raises(InputError, match=f"--gpu {gpu}: .* from T4 on"):
        rehearse(gpu=gpu, script=["python", "train.py"])


def test_a_gpu_that_nvml_has_no_known_name_of_is_stood_in_by_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "libraries", lambda store: store)
    gpu = gpu_named("rtx-3080-12gb")
    assert device.variables(gpu, tmp_path, tmp_path, devices=1, context_bytes=0.0)["FAKECUDA_NAME"] == gpu.name


@pytest.mark.parametrize("devices", ["all", 65, "0", "two"])
def test_a_number_of_devices_that_the_stand_in_does_not_have(devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(InputError, match="devices"):
        rehearse(gpu="a100-80gb", devices=devices, script=["python", "train.py"])
    launched = ["torchrun", "--nproc_per_node", {"all": "gpu"}.get(devices, str(devices)), "train.py"]
    with pytest.raises(InputError, match=r"--devices: on the stand-in|torchrun: (0 processes|.*'two')"):
        rehearse(gpu="a100-80gb", script=launched)


@pytest.mark.skipif(IS_FOR_CUDA, reason="is of a torch without CUDA")
def test_a_torch_without_cuda_is_told_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(MachineError, match=r"isn't a build for CUDA.*pip install 'torch==="):
        rehearse(gpu="a100-80gb", script=["python", "train.py"])
    with pytest.raises(MachineError, match="isn't a build for CUDA"):
        rehearse_on_all(script=["python", "train.py"])


def script(folder, gpu, *words, text=SCRIPT):
    (folder / "train.py").write_text(text)
    command = ("-m", "autotune", "script", "--dry-run", "--gpu", gpu, "--json", "--", "python", "train.py", *words)
    return python(*command, cwd=folder, AUTOTUNE_HOME=str(folder.parent / "home"))


def rehearsed(*given, **more):
    done = script(*given, **more)
    assert done.returncode == 0, done.stderr
    return Rehearsal.model_validate_json(done.stdout)


@pytest.mark.cuda
def test_an_own_module_takes_what_it_takes_when_it_runs_alone(tmp_path):
    several = SCRIPT.replace('report_to="none"', 'report_to="none", gradient_accumulation_steps=8')
    several = several.replace("1.0 if i % 4 else -1.0", "1.0").replace("range(batch)", "range(8 * batch)")  # alike
    found = rehearsed(tmp_path, "a100-80gb", 512, 4096, "data", text=several)
    assert found.chance_to_fit > 0.99
    assert [*found.parts.phases] == ["setting up", "first step", "later steps", "saving", "evaluating"]
    assert found.peak.allocated_bytes == max(phase.allocated_bytes for phase in found.parts.phases.values())
    assert "Net" in {row.module for row in found.parts.alive}
    assert any("evaluating counts" in note for note in found.notes), "its arguments don't evaluate"
    kept = [(row.module, row.allocated_bytes) for row in found.parts.alive if row.module and row.kind == "temporaries"]
    # cuBLAS's and cuBLASLt's, by torch's defaults
    assert kept == [("first", (8320 << 10) + (1 << 20))] * KEEPS_WORKSPACES
    own = (
        "import sys, torch; from autotune.stand_in import host_values; host_values.install()\n"
        "sys.argv = ['train.py', '512', '4096', 'data']; exec(open('train.py').read())\n"
        "print(torch.cuda.max_memory_allocated())"
    )
    # A trial keeps a few numbers on the device.
    alone_bytes = int(printed("-c", own, cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")[-1])
    assert 0 <= found.peak.allocated_bytes - alone_bytes <= 8 * 512
    assert sum(row.allocated_bytes for row in found.parts.alive) == pytest.approx(found.peak.allocated_bytes, rel=0.01)


# A loop without a Trainer, which counts what it has got right, and may train on as many samples.
LOOP = """
import sys
import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 16)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(10**6):
    logits, labels = net(torch.randn(4096, 64, device="cuda")), torch.randint(16, (4096,), device="cuda")
    right = (logits.argmax(1) == labels).sum().item()
    kept = 1 + right if sys.argv[1] == "kept" else 4096
    nn.functional.cross_entropy(logits[:kept], labels[:kept]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 19:
        print(torch.cuda.max_memory_allocated())
        sys.exit()
"""


@pytest.mark.cuda
def test_a_loop_takes_what_it_takes_when_it_runs_alone_unless_a_value_decides(tmp_path):
    found = rehearsed(tmp_path, "l4", "counted", text=LOOP)
    alone_bytes = int(printed("train.py", "counted", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")[-1])
    assert found.peak.allocated_bytes == alone_bytes
    assert [*found.parts.phases] == ["setting up", "first step", "later steps"]
    assert {"weights", "gradients", "optimizer states"} < {row.kind for row in found.parts.alive}
    read, of_loop = found.notes
    assert re.search(r"train.py:10: right = .* reads a value .*: with 0 and with 100 the memory is the same", read)
    assert "some 20 optimizer steps ran, on batches in its own order; longer" in of_loop
    done = script(tmp_path, "l4", "kept", text=LOOP)
    assert done.returncode == 3, done.stdout
    assert "train.py:10: right = " in json.loads(done.stdout)["refused"]


# Evaluates on more samples at once than it trains on, and counts those that it has got right.
EVALUATED = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(4096, 64), torch.randint(16, (4096,)))
net, loss_of = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 16)).cuda(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(net.parameters())
for epoch in range(3):
    net.train()
    for inputs, labels in DataLoader(data, 64):
        loss_of(net(inputs.cuda()), labels.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        for inputs, labels in DataLoader(data, 1024):
            logits = net(inputs.cuda())
            right = (logits.argmax(1) == labels.cuda()).sum().item()
    if sys.argv[1] == "fails":
        raise ValueError("no such thing")
print(torch.cuda.max_memory_allocated())
torch.save(net.state_dict(), "net.pt")
"""


@pytest.mark.cuda
def test_a_loop_goes_on_to_evaluate_and_to_save_and_writes_no_weights(tmp_path):
    alone_bytes = int(printed("-c", f"import sys; sys.argv[1:] = ['']\n{EVALUATED}", cwd=tmp_path)[-1])
    (tmp_path / "net.pt").write_text("of an earlier training")
    found = rehearsed(tmp_path, "l4", "succeeds", text=EVALUATED)
    assert found.peak.allocated_bytes == found.parts.phases["evaluating"].allocated_bytes == alone_bytes
    assert [*found.parts.phases] == ["setting up", "first step", "later steps", "evaluating", "saving"]
    assert (tmp_path / "net.pt").read_text() == "of an earlier training"
    assert "right = (logits" in found.notes[0]
    assert "evaluations on two batches each" in found.notes[1]
    found = rehearsed(tmp_path, "l4", "fails", text=EVALUATED)
    assert found.peak.allocated_bytes == alone_bytes
    assert "after 20 optimizer steps it was seen up to an error: no such thing" in found.notes[1]


OF_ACCELERATE = """
{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, mixed_precision: bf16, num_machines: 1, num_processes: 2,
 fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}}
"""


@pytest.mark.cuda
@pytest.mark.parametrize("by", [pytest.param("torchrun", marks=pytest.mark.slow), "accelerate"])
def test_the_first_of_two_devices_takes_what_it_takes_beside_the_other(tmp_path, by):
    """A rehearsal runs the first rank alone; what accelerate's file says, the script doesn't."""
    text = LLAMA_SCRIPT.replace("range(96)", "range(48)").replace("range(4, 48)", "range(47, 48)")
    text = text.replace("trainer.save_model()", "print('peak', torch.cuda.max_memory_allocated())")
    (tmp_path / "llama.py").write_text(text.replace("dataset.select(range(8))", "None"))
    command = ["llama.py", "--output_dir", "out", "--report_to", "none", "--save_strategy", "no"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if by == "torchrun":
        command += ["--bf16", "True"]
    else:
        launcher = ["accelerate.commands.launch", "--config_file", "fsdp.yaml"]
        (tmp_path / "fsdp.yaml").write_text(OF_ACCELERATE)
    asked = ("--dry-run", "--gpu", "a100-80gb", "--json", "--", "python", "-m", *launcher)
    done = python("-m", "autotune", "script", *asked, *command, cwd=tmp_path, AUTOTUNE_HOME=tmp_path)
    assert done.returncode == 0, done.stderr
    found = Rehearsal.model_validate_json(done.stdout)
    assert (found.devices, found.chance_to_fit > 0.99) == (2, True)
    plain = printed(
        "-m", *launcher, *command, "--max_steps", "3", cwd=tmp_path, CUDA_VISIBLE_DEVICES="0,1", FAKECUDA_DEVICES="2"
    )
    peaks = [int(line.split()[1]) for line in plain if line.startswith("peak")]
    assert 0 <= found.peak.allocated_bytes - max(peaks) <= 16 * 512


@pytest.mark.slow
@pytest.mark.cuda
def test_a_training_that_does_not_fit_is_told_what_would(tmp_path):
    done = script(tmp_path, "rtx-3070", 2048, 1 << 18, "data")
    assert done.returncode == 5, done.stderr
    document = json.loads(done.stdout)
    assert document.pop("error")["exit_code"] == 5
    found = Rehearsal(**document)
    assert found.peak.device_bytes > found.memory_bytes
    assert "asked for" in found.short
    *_, last = found.levers
    assert last.chance_to_fit > 0.5
    assert [change.knob for change in last.changes] == ["per_device_train_batch_size"]


@pytest.mark.cuda
def test_a_library_with_a_cuda_runtime_of_its_own_is_named_though_the_script_goes_on(tmp_path):
    source = 'extern "C" int cuGetExportTable(const void**, const void*);'  # which such a runtime begins with
    (tmp_path / "own.cpp").write_text(
        source + 'extern "C" int own() { const void* t; return cuGetExportTable(&t, &t); }'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "own.cpp", "-o", "libown.so"], cwd=tmp_path, check=True)
    called = f"import ctypes\nassert ctypes.CDLL('{tmp_path}/libown.so').own()\n"
    done = script(tmp_path, "l4", 64, 8, "data", text=SCRIPT.replace("rows = [", called + "rows = ["))
    assert done.returncode == 3, done.stdout
    assert "libown.so brings a CUDA runtime of its own" in json.loads(done.stdout)["refused"]


@pytest.mark.cuda
def test_what_a_script_sets_holds_but_its_choice_of_a_device_and_what_it_asks_is_of_the_gpu(tmp_path):
    sets = (
        "import os\n"
        "os.environ |= {'CUDA_VISIBLE_DEVICES': '3', 'HF_HOME': '/own'}\n"
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n"
        "import huggingface_hub.constants, torch\n"
        "assert huggingface_hub.constants.HF_HUB_CACHE == '/own/hub'\n"
        "there = torch.ones(1, device='cuda')\n"
        "assert torch.cuda.memory_snapshot()[-1]['is_expandable']\n"
        "total = torch.cuda.mem_get_info()[1], torch.cuda.get_device_properties(0).total_memory\n"
    )
    asking = SCRIPT.replace("rows = [", "batch >>= max(total) < 1 << 35\nrows = [")
    assert rehearsed(tmp_path, "l4", 64, 8, "data", text=sets + asking).workload.global_batch_size == 4


@pytest.mark.cuda
def test_where_values_of_the_model_decide_that_is_said(tmp_path):
    done = script(tmp_path, "l4", 64, 8, "model")
    assert done.returncode == 3, done.stdout
    assert "nonzero of values that only a GPU computes" in done.stderr
    assert "train.py:" in done.stderr
    assert json.loads(done.stdout)["refused"]


@pytest.mark.cuda
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_rehearsal_that_is_ended_leaves_no_process_and_if_it_can_no_file(tmp_path, number):
    (tmp_path / "train.py").write_text("import os, time\nopen('began', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    words = ("-m", "autotune", "script", "--dry-run", "--gpu", "l4", "--", "python", "train.py")
    with subprocess.Popen(**process(*words, cwd=tmp_path, TMPDIR=str(tmp_path))) as rehearsing:
        training = int(wait_for(tmp_path / "began"))
        rehearsing.send_signal(number)
        assert rehearsing.wait(60) == (-number if number == signal.SIGKILL else 130)
    until(lambda: not psutil.pid_exists(training), limit_s=20.0)
    assert number == signal.SIGKILL or not [*tmp_path.glob("autotune-*")]


@pytest.mark.cuda
def test_a_script_that_fails_while_it_trains_leaves_its_output(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    failing = SCRIPT.replace("self.first(f", "self.first(features[:, :5] + f")
    done = script(tmp_path, "l4", 64, 8, "data", text=failing)
    assert done.returncode == 3, done.stdout
    log = Path(re.search(r"RuntimeError: The size.*its output: (\S+)\)$", json.loads(done.stdout)["refused"])[1])
    assert re.search(r"train.py\", line \d+, in forward", log.read_text())


@pytest.mark.cuda
def test_where_they_decide_in_evaluation_alone_the_rest_is_told(tmp_path):
    found, whole = (rehearsed(tmp_path, "l4", 64, 8, routing) for routing in ("evaluated", "data"))
    del whole.parts.phases["evaluating"]
    assert found.parts.phases == whole.parts.phases
    assert found.chance_to_fit > 0.99
    assert any("evaluating can't be told: nonzero of values that only a GPU" in note for note in found.notes)
