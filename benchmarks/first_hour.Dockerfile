# A clean Debian for benchmarks/first_hour.py (docs/first_hour.md): docker build -t first-hour - < benchmarks/first_hour.Dockerfile
FROM debian:12-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv
WORKDIR /src
ENTRYPOINT ["python3", "-m", "benchmarks.first_hour", "--environment", "/opt/user"]
