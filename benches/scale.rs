//! Cost at scale: a generated checkpoint of the shape of a 1B Llama, set up and run on the emulated device.
//!
//! `cargo bench --bench scale` writes it once (2.5 GB of random bf16 under `target/phasegate/generated/`), sets it up,
//! runs a prefill and a few decode steps, and prints time and memory beside what `plan::Memory` says the model needs.
//! It is no part of `make bench`'s quick half: `make bench-scale`.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use phasegate::{
    error::{Error, Result},
    model::ModelConfig,
    phase::Subject,
    plan::{Memory, PlanOptions},
    report::provenance,
    runner::{Runner, RunnerOptions},
    settings,
};

const PROMPT: usize = 128;
const STEPS: usize = 16;

/// Llama-3.2-1B's shape.
const CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
  "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
  "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": true, "attention_bias": false,
  "mlp_bias": false, "bos_token_id": 1, "eos_token_id": 2
}"#;

fn main() -> Result<()> {
    let dir = generate()?;
    let subject = Subject::open(&dir.display().to_string(), None)?;
    let options = RunnerOptions::for_prompts([PROMPT], STEPS, subject.config.max_position_embeddings);
    let started = Instant::now();
    let mut runner = subject.runner("emu", &options)?;
    let setup = started.elapsed();
    let ids: Vec<u32> = (0..PROMPT as u32).map(|i| i * 7919 % 128_256).collect();
    runner.prefill(&ids)?;
    let started = Instant::now();
    runner.prefill(&ids)?;
    let prefill = started.elapsed();
    let started = Instant::now();
    for (step, &id) in ids.iter().enumerate().take(STEPS) {
        runner.decode_step(id, PROMPT + step)?;
    }
    let decode = started.elapsed();
    let needed = Memory::of(&subject.config, PROMPT, options.max_positions, &PlanOptions::default())?;
    println!("generated 1B llama: {} bytes of weights", needed.weights);
    println!("setup {:.2} s", setup.as_secs_f64());
    println!("prefill {PROMPT}: {:.1} tok/s", PROMPT as f64 / prefill.as_secs_f64());
    println!("decode at {PROMPT}: {:.1} tok/s", STEPS as f64 / decode.as_secs_f64());
    println!("needed {:.3} GB: {needed:?}", needed.total() as f64 / 1e9);
    if let Some(peak) = provenance::peak_memory() {
        let ratio = peak as f64 / needed.total() as f64;
        let verdict = if ratio <= 1.1 { "within" } else { "OVER" };
        println!("peak memory {:.3} GB, {ratio:.3} of what is needed, {verdict} 1.1", peak as f64 / 1e9);
    }
    Ok(())
}

/// The checkpoint's folder, written on first use.
fn generate() -> Result<PathBuf> {
    let dir = settings::work_dir().join("generated").join("llama_1b");
    let weights = dir.join("model.safetensors");
    if weights.is_file() {
        return Ok(dir);
    }
    fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    let config = dir.join("config.json");
    fs::write(&config, CONFIG).map_err(Error::io(&config))?;
    let (parsed, _) = ModelConfig::from_file(&dir)?;
    let partial = dir.join("model.safetensors.partial");
    write(&partial, &parsed)?;
    fs::rename(&partial, &weights).map_err(Error::io(&weights))?;
    Ok(dir)
}

/// Random values of standard deviation about 0.02, ones for the norms.
fn write(path: &Path, config: &ModelConfig) -> Result<()> {
    let tensors = config.tensors();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors.iter().map(|t| (&t.name, &t.shape)) {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::to_vec(&header).map_err(|e| Error::malformed(path, e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(Error::io(path))?);
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io(path));
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for tensor in &tensors {
        let len = tensor.shape.iter().product::<usize>();
        for piece in 0..len.div_ceil(1 << 16) {
            let piece: Vec<u8> = (piece << 16..len.min((piece + 1) << 16))
                .flat_map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let uniform = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                    half::bf16::from_f32(if tensor.shape.len() == 1 { 1.0 } else { 0.07 * uniform }).to_le_bytes()
                })
                .collect();
            put(&piece)?;
        }
    }
    file.flush().map_err(Error::io(path))
}
