# autotune on a host with a GPU. The host needs NVIDIA's driver and container toolkit; CUDA comes with torch's wheels.
#
#     docker build --tag autotune .
#     docker run --rm --init --gpus 1 --ipc host --volume "$PWD/runs:/workspace/runs" autotune find --model gpt2
#
# or, with what is kept between searches, `docker compose run --rm autotune find --model gpt2`.
FROM python:3.11-slim

# inductor compiles with g++, and Triton links with gcc, which comes along.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The libraries first: they change less often than the code.
WORKDIR /opt/autotune
COPY docker/constraints.txt docker/
RUN pip install --no-cache-dir --constraint docker/constraints.txt torch transformers accelerate peft bitsandbytes datasets

COPY pyproject.toml README.md LICENSE ./
COPY autotune autotune
COPY search_spaces search_spaces
RUN pip install --no-cache-dir --constraint docker/constraints.txt .

ENV AUTOTUNE_HOME=/workspace/home
WORKDIR /workspace
ENTRYPOINT ["autotune"]
CMD ["--help"]
