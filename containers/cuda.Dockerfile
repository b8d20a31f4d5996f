# syntax=docker/dockerfile:1
# The program for NVIDIA GPUs. It compiles and starts without one; it has not run on one so far (docs/guides/gpu.md).
ARG CUDA=13.0.1
ARG RUST=1.95.0
# 80: A100, 90: H100 and H200, 100: B200.
ARG COMPUTE_CAP=90

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
ARG RUST
ARG COMPUTE_CAP
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates curl gcc g++ && \
    rm -rf /var/lib/apt/lists/* && \
    curl --proto '=https' -fsS https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain "${RUST}"
ENV PATH=/root/.cargo/bin:${PATH} RUSTUP_TOOLCHAIN=${RUST} CUDA_HOME=/usr/local/cuda LONGDRAFT_COMPUTE_CAP=${COMPUTE_CAP}
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/root/.cargo/registry --mount=type=cache,target=/source/target \
    LIBRARY_PATH=/usr/local/cuda/lib64/stubs cargo build --profile dist --locked -p longdraft --features cloud,cuda && \
    install target/dist/longdraft /usr/local/bin/longdraft

FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04
# NVRTC compiles our kernels when they are first needed.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --non-unique --uid 1000 longdraft && \
    install -d -o longdraft -g longdraft /data /models
COPY --from=build /usr/local/bin/longdraft /usr/local/bin/longdraft
COPY conf /usr/local/share/longdraft/conf
COPY assets/corpus /usr/local/share/longdraft/assets/corpus
USER 1000
WORKDIR /data
ENV HF_HOME=/models
EXPOSE 8080
ENTRYPOINT ["longdraft"]
CMD ["doctor"]
