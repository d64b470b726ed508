//! Frames: the units that pass through the pipes between supervisor and worker.
//!
//! A *frame* is a head of fixed size (magic, kind, sequence number, length of the body), a body, and a digest of both.
//! The digest comes last, so that each side hashes a piece while the other one has the next. Nothing that comes in is
//! trusted: a length is checked against its limit before it is believed, and memory grows with the bytes that arrive,
//! not with those that are announced. `docs/protocol.md` is the contract with workers in other languages.

use std::io::{self, Read, Write};

use crc32fast::Hasher;

/// First bytes of every frame, before the version.
const MAGIC: [u8; 3] = *b"SMP";
/// Version of the protocol that this program speaks.
pub const VERSION: u8 = 3;
/// Number of bytes of magic and version, which every version begins with.
const OPENING: usize = MAGIC.len() + 1;
/// Number of bytes of a head: magic, version, kind, three zeros, sequence number, and length.
pub const HEAD: usize = 24;
/// Number of bytes of the digest, the CRC-32 of zlib: every Python has it in its standard library. It is there for
/// accidents, such as what a subject prints in the middle of a frame.
const DIGEST: usize = 4;
/// Size of the largest body, in bytes: twice the tensors of the largest judged case.
pub const BODY_MAX: u64 = 1 << 30;
/// Size of the largest body without tensors, in bytes.
pub const TEXT_BODY_MAX: u64 = 1 << 20;
/// Number of bytes that are reserved for a body before they arrive.
const ROOM: u64 = 1 << 20;
/// Number of bytes of a body that are hashed and passed on at once.
const PIECE: usize = 1 << 18;
/// Size of the largest body that is written together with its head and digest.
const AT_ONCE: usize = 1 << 16;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Request to the worker to open a subject.
    Open = 1,
    /// Request to the worker to run a problem.
    Run = 2,
    /// Answer to the supervisor that the subject is open.
    Ready = 3,
    /// Message to the supervisor that a run has reached a phase.
    Phase = 4,
    /// Answer to the supervisor with a run's results.
    Outputs = 5,
    /// Answer to the supervisor that there are no results, with the reason.
    Failed = 6,
}

impl Kind {
    /// Every kind, in order.
    pub const ALL: [Kind; 6] = [Kind::Open, Kind::Run, Kind::Ready, Kind::Phase, Kind::Outputs, Kind::Failed];

    fn of(byte: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Returns the size of the largest body of this kind, in bytes.
    pub fn body_max(self) -> u64 {
        if matches!(self, Kind::Run | Kind::Outputs) { BODY_MAX } else { TEXT_BODY_MAX }
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Kind of the message.
    pub kind: Kind,
    /// Number of the request that the message is, or answers.
    pub sequence: u64,
    /// Body of the message.
    pub body: Vec<u8>,
}

/// Reason why no frame came.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A pipe whose other side is gone.
    #[error("the pipe ended")]
    Ended,
    /// A frame of another version of the protocol.
    #[error("the other side speaks version {0} of the worker protocol, and this program version {VERSION}")]
    Version(u8),
    /// Bytes that are not a frame.
    #[error("no frame: {0}")]
    Garbage(String),
    /// A frame whose bytes are not those that were sent.
    #[error("the frame's digest is wrong")]
    Digest,
    /// A broken pipe.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Writes a frame and flushes it.
pub fn write(out: &mut dyn Write, kind: Kind, sequence: u64, body: &[u8]) -> io::Result<()> {
    let head = head(kind, sequence, body.len());
    let mut hash = hash(&head);
    if body.len() <= AT_ONCE {
        hash.update(body);
        out.write_all(&[&head, body, &hash.finalize().to_le_bytes()].concat())?;
    } else {
        out.write_all(&head)?;
        for piece in body.chunks(PIECE) {
            hash.update(piece);
            out.write_all(piece)?;
        }
        out.write_all(&hash.finalize().to_le_bytes())?;
    }
    out.flush()
}

fn head(kind: Kind, sequence: u64, length: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..MAGIC.len()].copy_from_slice(&MAGIC);
    head[MAGIC.len()] = VERSION;
    head[OPENING] = kind as u8;
    head[8..16].copy_from_slice(&sequence.to_le_bytes());
    head[16..].copy_from_slice(&(length as u64).to_le_bytes());
    head
}

/// Returns the hash of a frame with this head.
fn hash(head: &[u8; HEAD]) -> Hasher {
    let mut hash = Hasher::new();
    hash.update(head);
    hash
}

/// Reads the next frame, whose body may have at most `limit` bytes, and no more than its kind allows.
pub fn read(input: &mut dyn Read, limit: u64) -> Result<Frame, FrameError> {
    let mut head = [0; HEAD];
    // A frame of another version may be shorter than this head, so its version is looked at before more is awaited.
    input.read_exact(&mut head[..OPENING]).map_err(ended)?;
    if let Some(version) = head.strip_prefix(&MAGIC).map(|rest| rest[0]).filter(|version| *version != VERSION)
    {
        return Err(FrameError::Version(version));
    }
    let noise =
        |seen: &[u8]| FrameError::Garbage(format!("it begins with {:?}", seen.escape_ascii().to_string()));
    if !head.starts_with(&MAGIC) {
        return Err(noise(&head[..OPENING]));
    }
    input.read_exact(&mut head[OPENING..]).map_err(ended)?;
    if head[OPENING + 1..8] != [0; 3] {
        return Err(noise(&head[..8]));
    }
    let kind =
        Kind::of(head[OPENING]).ok_or_else(|| FrameError::Garbage(format!("kind {}", head[OPENING])))?;
    let (sequence, length) = (number(&head[8..16]), number(&head[16..]));
    let limit = limit.min(kind.body_max());
    if length > limit {
        return Err(FrameError::Garbage(format!("a body of {length} bytes; at most {limit} are taken")));
    }
    let mut body = Vec::with_capacity(length.min(ROOM) as usize);
    let mut hash = hash(&head);
    // Each piece is hashed while it is in the cache, and while the other side writes the next one.
    while (body.len() as u64) < length {
        let start = body.len();
        let piece = (PIECE as u64).min(length - start as u64);
        if (&mut *input).take(piece).read_to_end(&mut body)? as u64 != piece {
            return Err(FrameError::Ended);
        }
        hash.update(&body[start..]);
    }
    let mut expected = [0; DIGEST];
    input.read_exact(&mut expected).map_err(ended)?;
    if hash.finalize().to_le_bytes() != expected {
        return Err(FrameError::Digest);
    }
    Ok(Frame { kind, sequence, body })
}

fn ended(error: io::Error) -> FrameError {
    if error.kind() == io::ErrorKind::UnexpectedEof { FrameError::Ended } else { FrameError::Io(error) }
}

/// Reads eight bytes as a number, the least significant first.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(kind: Kind, sequence: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, kind, sequence, body).expect("a vector takes everything");
        bytes
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(sequence: u64, body in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let bytes = bytes(Kind::Outputs, sequence, &body);
            let frame = read(&mut &bytes[..], BODY_MAX).expect("a frame");
            prop_assert_eq!(frame, Frame { kind: Kind::Outputs, sequence, body });
        }

        #[test]
        fn no_byte_can_change_unseen(at in 0..HEAD + 40 + DIGEST, change in 1..=255_u8) {
            let mut bytes = bytes(Kind::Run, 7, &[3; 40]);
            bytes[at] ^= change;
            prop_assert!(read(&mut &bytes[..], BODY_MAX).is_err());
        }

        #[test]
        fn a_cut_frame_is_no_frame(kept in 0..HEAD + 40 + DIGEST) {
            let bytes = bytes(Kind::Run, 7, &[3; 40]);
            prop_assert!(matches!(read(&mut &bytes[..kept], BODY_MAX), Err(FrameError::Ended)));
        }

        #[test]
        fn noise_is_no_frame(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(read(&mut &noise[..], BODY_MAX).is_err());
        }
    }

    /// Test that a frame is what the page on the protocol says, byte by byte.
    #[test]
    fn a_frame_is_as_documented() {
        let bytes = bytes(Kind::Phase, 0x0102, &[4]);
        let prefix = *b"SMP\x03\x04\0\0\0\x02\x01\0\0\0\0\0\0\x01\0\0\0\0\0\0\0";
        assert_eq!((&bytes[..24], bytes[24], bytes.len()), (&prefix[..], 4, 29));
        // zlib.crc32(prefix + body).to_bytes(4, "little").hex()
        let digest: String = bytes[25..].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, "b3de9166");
    }

    #[test]
    fn a_frame_of_another_version_names_both() {
        for version in [0, 1, 2, 255] {
            let mut bytes = bytes(Kind::Run, 7, &[3; 40]);
            bytes[3] = version;
            for kept in [4, 10, bytes.len()] {
                let error = read(&mut &bytes[..kept], BODY_MAX).expect_err("another version");
                let expected = format!(
                    "the other side speaks version {version} of the worker protocol, and this program version 3"
                );
                assert_eq!(error.to_string(), expected);
            }
        }
    }

    #[test]
    fn a_body_without_tensors_is_short() {
        for kind in Kind::ALL {
            let head = head(kind, 1, TEXT_BODY_MAX as usize + 1);
            let is_garbage = matches!(read(&mut &head[..], BODY_MAX), Err(FrameError::Garbage(_)));
            assert_eq!(is_garbage, !matches!(kind, Kind::Run | Kind::Outputs), "{kind:?}");
        }
    }

    /// Test that a frame which announces more than it brings takes no more memory than the bytes that it brings.
    #[test]
    fn an_announced_length_takes_no_memory() {
        let mut head = head(Kind::Run, 1, BODY_MAX as usize);
        assert!(matches!(read(&mut &head[..], BODY_MAX), Err(FrameError::Ended)));
        head[16..].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(read(&mut &head[..], BODY_MAX), Err(FrameError::Garbage(_))));
    }
}
