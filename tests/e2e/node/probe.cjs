// A client that is given nothing but an address and certificates. It asks the standard health service, learns the API by
// reflection as grpcurl does, and calls Generate by what it learned. Prints one JSON object.
'use strict';

const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const SERVICE = 'glmserve.inference.v1.InferenceService';
const [address, ca, cert, key, apiKey, prompt] = process.argv.slice(2);
const tls = grpc.credentials.createSsl(fs.readFileSync(ca), fs.readFileSync(key), fs.readFileSync(cert));

function load(packageName, file) {
  const directory = path.dirname(require.resolve(`${packageName}/package.json`));
  return grpc.loadPackageDefinition(loader.loadSync(path.join(directory, file), { keepCase: true, enums: String }));
}

function withKey() {
  const metadata = new grpc.Metadata();
  metadata.set('authorization', `Bearer ${apiKey}`);
  return metadata;
}

function deadline() {
  return { deadline: Date.now() + 60_000 };
}

function checkHealth(service) {
  const { Health } = load('grpc-health-check', 'proto/health/v1/health.proto').grpc.health.v1;
  const client = new Health(address, tls);
  return new Promise((resolve, reject) =>
    client.check({ service }, deadline(), (error, reply) => (error ? reject(error) : resolve(reply.status))));
}

function reflect(requests) {
  const file = 'build/proto/grpc/reflection/v1alpha/reflection.proto';
  const { ServerReflection } = load('@grpc/reflection', file).grpc.reflection.v1alpha;
  const call = new ServerReflection(address, tls).ServerReflectionInfo(withKey(), deadline());
  return new Promise((resolve, reject) => {
    const replies = [];
    call.on('data', (reply) => replies.push(reply));
    call.on('error', reject);
    call.on('end', () => resolve(replies));
    requests.forEach((request) => call.write(request));
    call.end();
  });
}

// A FileDescriptorSet: each file is field 1, with its length as a varint before it.
function descriptorSet(files) {
  return Buffer.concat(files.flatMap((file) => {
    const head = [0x0a];
    let rest = file.length;
    for (; rest > 0x7f; rest >>>= 7) head.push((rest & 0x7f) | 0x80);
    return [Buffer.from([...head, rest]), file];
  }));
}

function generate(Client, metadata) {
  const request = { prompt, sampling: { temperature: 0, max_tokens: 8 } };
  const call = new Client(address, tls).Generate(request, metadata, deadline());
  return new Promise((resolve) => {
    const answer = { text: '', token_ids: [], finish: null };
    call.on('data', (message) => {
      answer.text += message.text;
      answer.token_ids.push(...message.token_ids);
      answer.finish = message.finish || answer.finish;
    });
    call.on('error', () => undefined);
    call.on('status', (status) => resolve({ ...answer, code: grpc.status[status.code], details: status.details }));
  });
}

async function main() {
  const health = { all: await checkHealth(''), service: await checkHealth(SERVICE) };
  const [listed, found] = await reflect([{ list_services: '' }, { file_containing_symbol: SERVICE }]);
  const files = found.file_descriptor_response.file_descriptor_proto;
  const options = { keepCase: true, longs: String, enums: String, oneofs: true };
  const definition = loader.loadFileDescriptorSetFromBuffer(descriptorSet(files), options);
  const Client = grpc.loadPackageDefinition(definition).glmserve.inference.v1.InferenceService;
  console.log(JSON.stringify({
    health,
    services: listed.list_services_response.service.map(({ name }) => name),
    methods: Object.keys(Client.service),
    answer: await generate(Client, withKey()),
    stranger: await generate(Client, new grpc.Metadata()),
  }));
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
