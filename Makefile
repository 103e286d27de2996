# `make help` lists the targets.
TOOL := go tool -modfile=tools/go.mod

.DEFAULT_GOAL := help
.PHONY: help build demo test check generate baseline format bench ci

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build face, core-runner and runink into bin/, with a NATS that takes less memory (internal/smallstack)
	go run ./internal/smallstack . bin/smallstack
	CGO_ENABLED=0 go build -modfile=bin/smallstack/go.mod -trimpath -ldflags '-s -w' -o bin/ ./cmd/...

demo: ## One fetch on a real data set, control plane and runner as two processes
	go run ./cmd/runink demo

test: ## Install what the tests need and pass them under the race detector
	scripts/test

check: ## Generated code, formatting, vet, lint
	scripts/check

generate: ## Generate Go from the .proto files
	$(TOOL) buf generate

baseline: ## Take the present .proto files as what later ones must not break
	$(TOOL) buf build --exclude-source-info -o schemas/baseline.binpb

openapi: ## Write docs/openapi.json anew
	go test ./cp/api -run OpenAPI -update

format: ## Format Go and protobuf
	$(TOOL) buf format -w
	gofmt -w $$(git ls-files '*.go')

bench: ## The benchmarks that the documentation quotes
	scripts/bench

ci: ## What must pass before a change lands
	.ci/run
